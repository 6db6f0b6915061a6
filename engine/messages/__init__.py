"""Tell users what was compiled and why.

May import: `compile` and below. Doors: `recompile_log.report_compilation`, `report.report_json`.
"""
