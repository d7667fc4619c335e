"""The dashboard's package. It shows what vmckpt.app.controller tells it and knows no other source."""
