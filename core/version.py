"""The one place that states draftpair's version."""

VERSION = "0.1.0"
