"""The loss that teaches the index branch to rank as the attention does."""
