"""What a run writes down about itself, and what is shown of it: metrics, trace, live view, report, summary.

Writers (pipeline, workers, learner) need `Tracer`, `open_tracking` and `RunFacts`. Readers (`status`, `write_report`,
`write_summary`, `LiveView`) read only the files of a run folder, so they work on a running, a finished and a killed run
alike. The metric names are in `asyncopd.tracking.keys`.
"""
