"""The dashboard's package. It shows what vmckpt.api tells it and knows no other source."""
