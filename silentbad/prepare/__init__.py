"""From pictures, masks and phrases to a data set: `python -m silentbad.prepare --help`.

Nothing else imports this package. It imports no torch: numpy and Pillow do the work."""
