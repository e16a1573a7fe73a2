"""When nodes fail: distributions, recorded traces, closed forms."""
