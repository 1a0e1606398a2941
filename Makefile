.PHONY: setup test lint docs bench mutants

setup: ## Make .venv with everything that development needs
	python3 -m venv .venv
	.venv/bin/pip install -q -c constraints.txt -e '.[dev]'

test: ## Run the tests (arguments: make test ARGS='-k fedsgm')
	.venv/bin/pytest -n auto --dist loadgroup $(ARGS)

lint: ## Check style, types, spelling and layers
	.ci/lint

docs: ## Build the documentation into site/
	.venv/bin/mkdocs build --strict

bench: ## Measure FedSGM beside a NumPy transcription, as a sweep, and as a command
	.venv/bin/python benchmarks/neyman_pearson.py

mutants: ## See which small changes of the source no test notices (arguments: make mutants ARGS='storage --sample 20')
	.venv/bin/python benchmarks/mutants.py $(ARGS)
