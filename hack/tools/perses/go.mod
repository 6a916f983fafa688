module nestor.dev/hack/perses

go 1.23.4

require github.com/perses/perses v0.50.3
