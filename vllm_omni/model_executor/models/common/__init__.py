"""What several families share unchanged; a change here must be right for all of them."""
