"""The figures of the report, one subject a module; each function takes what was read from a run and gives an SVG."""
