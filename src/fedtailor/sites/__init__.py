"""The same run across real sites: every client in a process of its own, where its rows and its personal state stay."""
