# One pattern matches the packages of every module that go.work names, and no other
# place lists the modules: `go list -m` does.
ALL         := github.com/holdfast-go/holdfast/...
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
OLDGO       := go1.25.0
TARGETS     := linux/arm64 darwin/arm64 windows/amd64
# Tests start servers and measure time, so few packages run at once.
P           ?= 2
FUZZTIME    ?= 5s
# The commit that `make compare` compares with.
BASE        ?= HEAD

GOTEST   = go test -count=1 -p $(P)
REQUIRE  = HOLDFAST_REQUIRE=redis,cc,postgres,mariadb,pgbouncer,etcd,zookeeper
# Tests that switch rules of the protocol off, or move a client's clock, need this tag.
RULES    = -tags holdfast_rules github.com/holdfast-go/holdfast/conformance/rules \
           github.com/holdfast-go/holdfast/conformance/tokens github.com/holdfast-go/holdfast/conformance/queue

# These, and all others, also where these have failed.
tests    = set -x; failed=0; $(1) $(RULES) || failed=1; \
           $(1) $$(go list $(ALL) | grep -Ev '/conformance/(rules|tokens|queue)$$') || failed=1; exit $$failed

.PHONY: help deps test race soak check fmt vet staticcheck cross modules static release fuzz bench compare models

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: ## install what the tests need (servers of Redis and SQL, a C compiler) where it is missing
	@.ci/deps

test: deps ## run the tests of every module, with small counts
	@$(call tests,$(REQUIRE) $(GOTEST) -timeout 10m)

race: deps ## the same under the race detector
	@$(call tests,$(REQUIRE) $(GOTEST) -race -timeout 20m)

soak: deps ## the same with full counts, printing their figures
	@$(call tests,HOLDFAST_SOAK=1 $(REQUIRE) $(GOTEST) -v -p 1 -timeout 3h)

check: fmt vet staticcheck cross modules static ## everything that needs no server

fmt: ## fail where gofmt would change a file
	@files=$$(gofmt -l .); test -z "$$files" || { echo "gofmt would change:"; echo "$$files"; exit 1; }

vet: ## go vet for this system
	go vet $(ALL)
	go vet $(RULES) github.com/holdfast-go/holdfast/redlock

staticcheck: ## staticcheck, at a pinned version
	go run $(STATICCHECK) $(ALL)
	go run $(STATICCHECK) $(RULES) github.com/holdfast-go/holdfast/redlock

cross: ## compile everything, tests too, for the other systems
	@set -e; for t in $(TARGETS); do echo "go vet for $$t"; \
		GOOS=$${t%/*} GOARCH=$${t#*/} CGO_ENABLED=0 go vet $(ALL); done

modules: ## each module alone: tidy, builds without go.work, libraries with the previous Go
	@set -e; for dir in $$(go list -m -f '{{.Dir}}'); do echo "module $$dir"; cd $$dir; \
		GOWORK=off go mod tidy -diff; GOWORK=off go build -o /dev/null ./...; \
		if grep -q '^go 1\.25' go.mod; then GOTOOLCHAIN=$(OLDGO) GOWORK=off go build ./...; fi; done

static: ## the command as it is released: one static binary that needs nothing to run
	@.ci/release --try

release: ## build the release archives and SHA256SUMS into dist
	@.ci/release dist

fuzz: ## fuzz every fuzz function for FUZZTIME
	@.ci/fuzz $(FUZZTIME)

bench: deps ## run the benchmarks
	$(GOTEST) -p 1 -run '^$$' -bench . -benchmem -timeout 1h $(ALL)

compare: deps ## compare the uncontended benchmarks with those of the commit BASE
	@.ci/compare $(BASE)

models: ## check the models of the protocol, and that every mutant is caught (5 minutes; all: models/run all)
	@.ci/deps models
	@models/run fast
