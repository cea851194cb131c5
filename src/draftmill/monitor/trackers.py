"""Where metrics go besides metrics.jsonl. Owns the trackers by name; filled in below as they are added."""

from __future__ import annotations
