"""The dashboard. It shows what vmckpt.app tells it and knows no other source."""
