# Shortcuts; every line can be typed by hand.
.PHONY: venv quickstart test test-all check torture bench golden

venv:
	.ci/venv dev

quickstart:
	bash .ci/venv && .venv/bin/vitra submit --local launcher/examples/quickstart.yaml

test:
	bash .ci/venv test && .venv/bin/python -m pytest

test-all:
	bash .ci/venv test && .venv/bin/python -m pytest -m "slow or not slow"

check:
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright && .venv/bin/lint-imports && .venv/bin/deptry .

# Kills at random moments, far more often than CI has time for: whole runs, every strategy and every
# change of topology, then the store alone, on disk and on S3.
torture:
	VITRA_TORTURE_ROUNDS=50 .venv/bin/python -m pytest -m slow tests/e2e/test_resume_equal.py
	VITRA_TORTURE_ROUNDS=5 .venv/bin/python -m pytest -m slow tests/e2e/test_strategies.py tests/dist/test_topologies.py
	VITRA_TORTURE_ROUNDS=200 .venv/bin/python -m pytest -m "slow or not slow" tests/e2e/test_store_kill.py tests/s3/test_kill.py

# What a strategy costs a step, side by side with the bare loop; what saving and loading costs.
bench:
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.bench.step_time
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.bench.storage

golden:
	VITRA_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/unit/test_request.py
