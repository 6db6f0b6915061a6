"""Define the node Load Compile Cache."""

from comfy_api.latest import io

from ..engine.host.nodes.cache_files import NO_FILE, cache_files, load_cache, state_of


class LoadCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TorchCompileKitLoadCache",
            display_name="Load Compile Cache",
            category="torch compile",
            description="Loads a file of Save Compile Cache, so that this machine need not compile. Put it before Torch "
            "Compile Warmup and the sampler. A file of another GPU or PyTorch, or a damaged one, is ignored, and compiling "
            "happens as usual. Such files hold code that runs on your machine: use only your own and those of people you "
            "trust.",
            search_aliases=["import compile cache", "torch.compile", "mega cache"],
            is_output_node=True,  # else a reloaded page gets no report when all later nodes are cached
            inputs=[
                io.Model.Input("model", tooltip="Any model; it passes through."),
                io.Combo.Input(
                    "file",
                    options=[NO_FILE, *cache_files()],
                    default=NO_FILE,
                    tooltip="A file in the folder user/torch-compile-kit of ComfyUI, where you have put it yourself. It holds "
                    "code: no workflow can bring one along or fetch one.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The same model."),
                io.String.Output(display_name="report", tooltip="What was loaded, or why the file was refused."),
            ],
        )

    @classmethod
    def validate_inputs(cls, file) -> bool:
        return True  # a missing file must not stop sampling; `execute` reports it

    @classmethod
    def fingerprint_inputs(cls, file, **_inputs) -> str:
        return state_of(file)

    @classmethod
    def execute(cls, model, file) -> io.NodeOutput:
        report = load_cache(file)
        return io.NodeOutput(model, report, ui={"text": [report]})
