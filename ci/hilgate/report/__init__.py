# SPDX-License-Identifier: Apache-2.0
"""What a person reads of a verdict: HTML, annotation, terminal, JUnit, tables, history."""
