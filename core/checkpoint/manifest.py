"""The name of the file that says where a drafter was cut from, and what was written."""

MANIFEST = "draftpair-manifest.json"
