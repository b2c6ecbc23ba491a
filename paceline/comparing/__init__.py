"""`paceline compare`: one problem under several policies, with the same data and initial parameters."""
