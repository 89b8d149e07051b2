"""From pictures, masks and phrases to a data set: `python -m silentbad.prepare --help`.

Nothing else imports this package, and it imports no torch: numpy and Pillow do the work."""
