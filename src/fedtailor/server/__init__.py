"""What the server does with uploads (reduce) and whom it invites (cohort)."""
