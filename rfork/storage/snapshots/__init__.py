"""Images in storage: write, restore, list, verify and remove snapshots."""
