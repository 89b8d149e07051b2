"""The former place of silentbad/settings/types.py."""

from silentbad.settings.types import *  # noqa: F403
