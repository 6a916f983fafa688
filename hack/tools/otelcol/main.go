// Command otelcol is an OpenTelemetry Collector for tests. It receives spans by OTLP, and its exporter "lines" writes them
// to standard error, one line of JSON for each request. Its one argument is the configuration.
package main

import (
	"context"
	"log"
	"os"
	"sync"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/yamlprovider"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry"
)

func main() {
	settings := otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol", Description: "collector of tests", Version: "1"},
		Factories: factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{
			ResolverSettings: confmap.ResolverSettings{
				DefaultScheme:     "yaml",
				ProviderFactories: []confmap.ProviderFactory{yamlprovider.NewFactory()},
			},
		},
	}
	if err := otelcol.NewCommand(settings).Execute(); err != nil {
		log.Fatal(err)
	}
}

func factories() (otelcol.Factories, error) {
	receivers, err := otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory())
	if err != nil {
		return otelcol.Factories{}, err
	}
	exporters, err := otelcol.MakeFactoryMap[exporter.Factory](linesFactory())
	// The collector's own telemetry is not needed.
	own := telemetry.NewFactory(func() component.Config { return &struct{}{} })
	return otelcol.Factories{Receivers: receivers, Exporters: exporters, Telemetry: own}, err
}

// lines is an exporter that writes spans to standard error.
type lines struct {
	component.StartFunc
	component.ShutdownFunc
	writing sync.Mutex
}

func linesFactory() exporter.Factory {
	create := func(context.Context, exporter.Settings, component.Config) (exporter.Traces, error) {
		return &lines{}, nil
	}
	config := func() component.Config { return &struct{}{} }
	kind := component.MustNewType("lines")
	return exporter.NewFactory(kind, config, exporter.WithTraces(create, component.StabilityLevelStable))
}

func (*lines) Capabilities() consumer.Capabilities { return consumer.Capabilities{} }

// ConsumeTraces writes one line.
func (l *lines) ConsumeTraces(_ context.Context, spans ptrace.Traces) error {
	line, err := (&ptrace.JSONMarshaler{}).MarshalTraces(spans)
	if err != nil {
		return err
	}
	l.writing.Lock()
	defer l.writing.Unlock()
	_, err = os.Stderr.Write(append(line, '\n'))
	return err
}
