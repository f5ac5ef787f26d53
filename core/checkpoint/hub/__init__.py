"""The Hub: its local cache, repositories read by range, what is fetched of them, and uploads.

The only place that uses huggingface_hub, which is imported when a Hub name is used and not before.
"""
