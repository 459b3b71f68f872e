"""A real model, real text and real questions, made from pinned packages."""
