"""Twenty prompts of many kinds and lengths, written for this project."""

from __future__ import annotations

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Q: What is 12 times 12?\nA:",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "import numpy as np\n\n# Compute the mean of an array\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Die Hauptstadt von Österreich ist",
    "In 1969, Neil Armstrong",
    "Roses are red,\nViolets are blue,\n",
    "SELECT name, age FROM people WHERE",
    "My favourite recipe for pancakes: first,",
    "To be, or not to be:",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age":',
    "The meaning of the word 'tightrope' is",
    "Step 1: open the box. Step 2: read the manual. Step 3:",
    "Photosynthesis is how plants turn light into chemical energy. It takes place in the "
    "chloroplasts, which hold a green pigment called chlorophyll. The process has two parts:",
)
