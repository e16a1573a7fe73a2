"""Lets ranks that survive a failure seal the newest step in memory before they end."""
