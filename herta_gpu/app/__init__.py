"""The command line `herta` and what it writes; `app/README.md` describes it."""
