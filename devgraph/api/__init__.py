"""The contract: what backends implement, what policies and runners build on."""
