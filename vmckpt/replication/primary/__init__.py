"""The guest's side: captures epochs, sends them, holds output until they are committed."""
