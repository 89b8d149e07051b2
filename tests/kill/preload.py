"""What the fork server imports once; nothing here computes, so no thread is started before the fork."""

import tests.conftest  # noqa: F401  offline, one thread
import train_silentbad  # noqa: F401
