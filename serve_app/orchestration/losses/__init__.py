"""Notices work that was lost or stands still, finds what is to blame, and retries the rest."""
