"""What is measured, per client and over clients."""
