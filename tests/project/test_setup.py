"""What dev.py sets up: which environment, which packages, which ComfyUI. No network; what is installed is made here."""

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile

import pytest

from devtools import cli, commands, hosts, matrix, setup, suite, venvs


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """A folder in the place of .dev/."""
    for module in (commands, hosts, setup, venvs):
        monkeypatch.setattr(module, "DEV", tmp_path)
    for module in (commands, setup):
        monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    return tmp_path


@pytest.fixture
def host(tmp_path):
    folder = tmp_path / "ComfyUI"
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text('# generated\n__version__ = "0.33.0"\n')
    (folder / "requirements.txt").write_text("torch\ntorchvision\ntorchaudio\n\n# more\ncomfy-kitchen==0.2.31\n")
    return folder


def archive(path, **files):
    with tarfile.open(path, "w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    "line",
    [
        "test --torch 2.15 --comfyui X -k warmup --co",
        "--torch 2.15 test --comfyui X -k warmup --co",
        "--torch 2.15 --comfyui X test -k warmup --co",
    ],
)
def test_host_and_pytorch_are_chosen_before_or_behind_the_command(line):
    options, rest = cli.parse(line.split())
    assert (options.torch, options.comfyui, options.part) == ("2.15", "X", "first")
    assert rest == ["-k", "warmup", "--co"]


def test_the_newest_part_brings_its_host_and_pytorch_unless_others_are_chosen():
    options, _ = cli.parse(["test", "--newest"])
    assert (options.part, options.comfyui, options.torch) == ("newest", hosts.NEWEST[0], venvs.NEWEST)
    options, _ = cli.parse(["matrix", "--newest", "--torch", "2.13", "--comfyui", "X"])
    assert (options.part, options.comfyui, options.torch) == ("newest", "X", "2.13")


def test_a_pytorch_without_pins_and_two_parts_at_once_are_refused(capsys):
    for line, words in (
        ("setup --torch 9.9", "'9.9' (choose from"),
        ("test --core --newest", "not allowed with"),
        ("lint --core", "--core"),
        ("demo -k x", "-k x"),
    ):
        with pytest.raises(SystemExit):
            cli.parse(line.split())
        assert words in capsys.readouterr().err


def test_each_pytorch_has_an_environment_of_its_own(dev, monkeypatch):
    assert venvs.venv_folder() == venvs.venv_folder("2.11") == dev / "venv"
    assert venvs.venv_folder("2.15") == dev / "venv-2.15"
    monkeypatch.setattr(venvs, "DEV", dev / "a path" / ".dev")
    monkeypatch.setenv("XDG_CACHE_HOME", str(dev / "cache"))
    folders = [venvs.venv_folder(torch) for torch in venvs.TORCH]
    assert len(set(folders)) == len(venvs.TORCH) and {folder.parent for folder in folders} == {
        dev / "cache" / "torch-compile-kit"
    }


def test_requirements_name_each_package_of_pytorch_once_and_as_pinned(host):
    for torch, (version, torchvision) in venvs.TORCH.items():
        assert version.startswith(f"{torch}.")
        lines = venvs.requirements(host, torch)
        torchaudio = version if torch in ("2.8", "2.9", "2.10") else venvs.TORCHAUDIO
        assert [line for line in lines if line.startswith("torch")] == [
            f"torch=={version},!={version}+cpu",
            f"torchvision=={torchvision}",
            f"torchaudio=={torchaudio}",
        ]
        assert "comfy-kitchen==0.2.31" in lines and any(line.startswith("pytest==") for line in lines)


def test_another_host_in_the_same_environment_installs_what_differs_and_says_so(dev, host, monkeypatch, capsys):
    installed = []
    monkeypatch.setattr(venvs, "run", lambda command, doing, **variables: installed.append(command[-1].read_text()))
    monkeypatch.setattr(venvs, "check_disk", lambda folder: None)
    venv = dev / "venv"
    venv.mkdir()
    for _ in range(2):
        venvs.install(venv, host)
    assert len(installed) == 1 and "comfy-kitchen==0.2.31" in installed[0]
    assert "other requirements" not in capsys.readouterr().out
    (host / "requirements.txt").write_text("comfy-kitchen==0.2.26\n")
    venvs.install(venv, host)
    assert len(installed) == 2 and "comfy-kitchen==0.2.26" in installed[1]
    assert "made for other requirements; this ComfyUI wants comfy-kitchen==0.2.26\n" in capsys.readouterr().out


def test_a_limit_that_the_machine_sets_for_pip_does_not_hold_here(dev, host, monkeypatch, tmp_path):
    (dev / "wheels").mkdir()
    for version in "1.0", "2.0":
        with zipfile.ZipFile(dev / "wheels" / f"limited-{version}-py3-none-any.whl", "w") as wheel:
            about = f"limited-{version}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: limited\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    (tmp_path / "limits.txt").write_text("limited<2\n")
    (tmp_path / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path / 'limits.txt'}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(dev / "wheels"))
    monkeypatch.setattr(venvs, "check_disk", lambda folder: None)
    monkeypatch.setattr(venvs, "let_torchaudio_import", lambda venv: None)
    monkeypatch.setattr(venvs, "requirements", lambda host, torch: ["limited==2.0"])
    venv = dev / "venv"
    venvs.make_venv(venv)
    venvs.install(venv, host)
    assert list(venv.glob("**/limited-2.0.dist-info"))


def test_an_installation_that_fails_leaves_no_stamp_of_an_earlier_one(dev, host, monkeypatch):
    monkeypatch.setattr(venvs, "check_disk", lambda folder: None)
    monkeypatch.setattr(venvs, "run", lambda command, doing, **variables: None)
    venv = dev / "venv"
    venv.mkdir()
    venvs.install(venv, host)
    before = (host / "requirements.txt").read_text()
    (host / "requirements.txt").write_text("comfy-kitchen==0.2.26\n")

    def fails(command, doing, **variables):
        raise commands.SetupError("no network")

    monkeypatch.setattr(venvs, "run", fails)
    with pytest.raises(commands.SetupError):
        venvs.install(venv, host)
    (host / "requirements.txt").write_text(before)
    with pytest.raises(commands.SetupError):
        venvs.install(venv, host)


def test_torchaudio_no_longer_looks_at_the_version_of_cuda_once_it_is_patched(tmp_path):
    file = tmp_path / "lib" / "python3.12" / "site-packages" / "torchaudio" / "_extension" / "utils.py"
    with pytest.raises(commands.SetupError, match=r"torchaudio 2.11.0 is not in .* ComfyUI would not start"):
        venvs.let_torchaudio_import(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("def _check_cuda_version():\n    raise RuntimeError('different CUDA versions')\n")
    for _ in range(2):
        venvs.let_torchaudio_import(tmp_path)
    assert file.read_text().count("return None") == 1
    module = {}
    exec(file.read_text(), module)  # noqa: S102  written above
    assert module["_check_cuda_version"]() is None
    file.write_text("pass\n")
    with pytest.raises(commands.SetupError, match="has no _check_cuda_version"):
        venvs.let_torchaudio_import(tmp_path)


def test_a_lent_archive_is_unpacked_only_if_it_is_the_pinned_one(dev, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "LENT", tmp_path / "hosts")
    target = hosts.choose("0.33.0")
    assert target == dev / "comfyui-0.33.0"
    with pytest.raises(commands.SetupError, match=r"is not in the package registry.*--comfyui"):
        hosts.get(target, "python")
    (tmp_path / "hosts").mkdir()
    file = tmp_path / "hosts" / "comfyui-0.33.0.tar.xz"
    archive(file, **{"comfyui-0.33.0/main.py": b"x", "comfyui-0.33.0/../../escaped": b"x", "other/main.py": b"x"})
    with pytest.raises(commands.SetupError, match=r"is not the file that is pinned.*It was not unpacked"):
        hosts.get(target, "python")
    assert not target.exists()
    monkeypatch.setattr(hosts, "NEWEST", ("0.33.0", hosts.hashlib.sha256(file.read_bytes()).hexdigest()))
    hosts.get(target, "python")
    assert [path.name for path in target.rglob("*")] == ["main.py"]
    assert not (tmp_path / "escaped").exists() and not (dev / "comfyui-0.33.0.partial").exists()


def test_a_folder_that_is_no_comfyui_is_refused_with_the_versions_there_are(dev, host):
    assert hosts.choose(str(host)) == host.resolve() and hosts.version_in(host) == "0.33.0"
    assert hosts.choose() == dev / f"comfyui-{hosts.COMFYUI_VERSION}"
    with pytest.raises(commands.SetupError, match=r"is no ComfyUI folder .* no version .*0\.30\.0, 0\.26\.0"):
        setup.set_up(comfyui=str(dev / "elsewhere"))


def test_the_parts_of_the_suite_are_tests_that_exist():
    assert suite.arguments("whole") == []
    assert suite.arguments("first") == ["-m", "not rest"] and suite.arguments("rest") == ["-m", "rest"]
    for chosen in (suite.CORE, suite.NEWEST):
        for name in suite.tests_of(chosen):
            file, _, test = name.partition("::")
            code = (commands.ROOT / file).read_text(encoding="utf-8")
            assert f"def {test.partition('[')[0]}(" in code if test else code, f"devtools/suite.py names {name}, which is gone"
    newest = suite.arguments("newest")
    assert "tests/canaries/test_names.py" in newest and set(suite.arguments("core")) < set(newest)


def commands_in(text):
    """The arguments of dev.py in the commands of a script or a workflow."""
    return [line.split() for line in re.findall(r"dev\.py(?= |$)(.*)$", text, re.MULTILINE)]


def test_ci_and_the_workflows_call_commands_that_there_are():
    """What CONTRIBUTING.md says, and each of its parts somewhere."""
    root = commands.ROOT
    scripts = {file: commands_in(file.read_text()) for file in [root / ".ci" / "run", *root.glob(".github/workflows/*.yml")]}
    for found in scripts.values():
        for arguments in found:
            assert cli.parse(arguments)[1] == [], arguments
    for file in (root / ".ci" / "run", root / ".github" / "workflows" / "tests.yml"):
        parts = {options.part for options in (cli.parse(a)[0] for a in scripts[file]) if options.command == "test"}
        # The rest runs on a machine beside.
        others = {"rest", "windows"} if file.suffix == ".yml" else set()
        assert parts == {"first", "newest"} | others and ["lint"] in scripts[file]


def test_what_runs_on_windows_is_there():
    for test in suite.WINDOWS + suite.NOT_ON_WINDOWS:
        file, _, name = test.partition("::")
        assert (commands.ROOT / file).exists() and f"def {name}(" in ((commands.ROOT / file).read_text() if name else "def (")


def test_a_release_is_published_behind_the_tests():
    yaml = pytest.importorskip("yaml")
    workflows = commands.ROOT / ".github" / "workflows"
    publish, tests = (yaml.safe_load((workflows / name).read_text()) for name in ("publish.yml", "tests.yml"))
    assert publish["jobs"]["publish"]["needs"] == "tests"
    assert publish["jobs"]["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert "workflow_call" in tests[True]  # "on" is a boolean to YAML 1.1
    assert tests["jobs"]["tests"]["strategy"]["matrix"]["python"] == ["3.10", "3.12", "3.13"]


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure message="x"/></testcase>
<testcase classname="tests.a" name="fails"><error message="and its fixture"/></testcase>
<testcase classname="tests.a" name="b"><skipped type="pytest.skip" message="a GPU has them">a.py:1</skipped></testcase>
<testcase classname="tests.a" name="c"><skipped type="pytest.skip" message="a GPU has them">a.py:9</skipped></testcase>
<testcase classname="tests.a" name="d"><skipped type="pytest.xfail" message="pytorch#1"/></testcase>
<testcase classname="" name="tests.e"><skipped type="pytest.skip" message="collection skipped">('e.py', 3, 'Skipped: no CUDA')
</skipped></testcase>
</testsuite></testsuites>"""


def test_a_run_is_counted_with_every_reason_to_skip(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert matrix.outcome(tmp_path / "junit.xml") == {
        "passed": 1,
        "failed": ["tests.a::fails"],
        "skipped": {"tests.e: no CUDA": 1, "a GPU has them": 2, "fails as expected: pytorch#1": 1},
    }


def test_a_run_takes_the_place_of_the_last_one_of_its_kind_newest_first(tmp_path):
    def run(comfyui, torch, part="whole", passed=0):
        return {"comfyui": comfyui, "torch": torch, "part": part, "passed": passed}

    file = tmp_path / "runs.json"
    for entry in (
        run("0.26.0", "2.11.0+cu130", "core"),
        run("0.33.0", "2.9.1+cu130"),
        run("0.33.0", "2.15.0+cu132"),
        run("0.33.0", "2.15.0+cu132", "core"),
        run("0.33.0", "2.15.1+cu132", passed=5),
    ):
        matrix.merge(file, entry)
    assert matrix.json.loads(file.read_text())["runs"] == [
        run("0.33.0", "2.15.1+cu132", passed=5),
        run("0.33.0", "2.15.0+cu132", "core"),
        run("0.33.0", "2.9.1+cu130"),
        run("0.26.0", "2.11.0+cu130", "core"),
    ]


def test_a_run_that_is_told_to_end_is_no_result(monkeypatch):
    """The tests end with 0 then, if those that had ended passed."""
    lines = "import signal, sys, time", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", "print('up', flush=True)"
    ends_well = "; ".join([*lines, "time.sleep(60)"])
    before = signal.getsignal(signal.SIGTERM)
    started = subprocess.Popen

    def start(command, **options):
        process = started(command, stdout=subprocess.PIPE, **options)
        process.stdout.readline()  # its handler is there
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return process

    monkeypatch.setattr(cli.subprocess, "Popen", start)
    try:
        assert cli.run([sys.executable, "-c", ends_well], dict(os.environ)) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
