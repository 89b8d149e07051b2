"""The former place of silentbad/settings/train.py."""

from silentbad.settings.train import *  # noqa: F403
