"""Images: opening, scanning, splitting, batching."""
