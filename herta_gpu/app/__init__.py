"""The command line `herta`, one module per command.

train, predict, tune, plan, profile, compare, info   the commands

cli         where the command line begins; it stays light, so that Ctrl-C works from the start
dispatch    runs the command that was asked for; errors become a sentence and an exit code
arguments   the options, and the function of each command
experiment  what several commands do alike: model and data from the options, and one fit
results     what a fit gives (FitResult), as JSON and as text
runs        run folders; report: the page about a fit, also from Python
page, pictures, text, streams, metrics   how results are shown, and how they are scored
demo        `make demo`
"""
