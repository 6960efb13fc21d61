"""The command line `herta`, one module per command.

train, predict, tune, plan, profile, compare, convert, selftest, info   the commands

cli         where the command line begins: arguments, errors, exit codes
arguments   the options, and the function of each command
experiment  what several commands do alike: model and data from the options, and one fit
results     what a fit gives (FitResult), as JSON and as text
runs        run folders; report: the page about a fit, also from Python
crew        the processes that mpirun started
metrics, text   how results are scored, and how they are shown
demo        `make demo`
"""
