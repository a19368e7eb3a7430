"""The test suite. Test files import the shared helpers as `from tests.workers import run_ranks`."""
