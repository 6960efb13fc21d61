"""The command line `herta`, a module per command or two that are alike.

cli        where the command line begins: arguments, errors, exit codes
arguments  the options, and the function of each command
train      a model, its data and one fit: `Job`, which `tune` and `compare` (and profile) share
predict, plan, selftest (with device_checks), info (and convert)   the other commands
runs       run folders
results    what a fit gives (FitResult), as JSON and as text; metrics: how results are scored
report     the page about a fit, with its pictures, also from Python
crew       the processes that mpirun started; demo: `make demo`
"""
