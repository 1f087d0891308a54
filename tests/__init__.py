"""The tests; a package so that ``tests.support`` can't be taken for another one's."""
