"""Training: set-up, loop, optimizer, schedule. Import `train` from `draftmill.train.run`."""
