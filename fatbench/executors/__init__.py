"""Executors hand cells to workers: processes on this machine, Ray tasks, SLURM jobs.

An executor is a function (jobs, machine, lanes, watch, stop) -> outcomes, where `lanes` are the devices that work side
by side, `watch` takes the workers' events and `stop` says that the user wants to end.
"""
