"""What was compiled and why, in the user's words: the notice when sampling compiles, the report.

May import: `compile` and what is below it. Doors: `recompile_log.report_compilation`, `report.report_json`.
"""
