"""What will be done, decided from sizes and settings before anything large is allocated."""
