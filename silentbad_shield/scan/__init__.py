"""Find pictures that are dispersed in a data set: `python -m silentbad_shield.scan`. Pictures and captions
are searched for elements that recur at one place under one phrase, by numpy alone. No other package
imports this one; what it wrote is read through `silentbad_shield.scan_file`. docs/shield.md explains
method and limits."""
