# SPDX-License-Identifier: Apache-2.0
"""The module that reads docs/recipes.toml, which is beside the pages and in no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("docs_recipes", Path(__file__).parents[2] / "docs/recipes.py")
assert _spec
assert _spec.loader
recipes = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = recipes
_spec.loader.exec_module(recipes)
