"""Tests with real containers on a real node; run ``tox -e node`` on a disposable machine."""
