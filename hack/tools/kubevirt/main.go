// Command kubevirt prints what KubeVirt's own operator would install, as JSON: definitions, rights, webhooks, the
// API services and the Secrets with certificates. Its components run on the host of a lab.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/rbac"
)

const (
	namespace = "kubevirt"
	lifetime  = 365 * 24 * time.Hour
)

type objects struct {
	Definitions []runtime.Object `json:"definitions"`
	Objects     []runtime.Object `json:"objects"`
	Hooks       []runtime.Object `json:"hooks"`
}

func main() {
	all, err := generate()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(all)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func generate() (*objects, error) {
	definitions, err := definitions()
	if err != nil {
		return nil, err
	}
	certificates, err := certificates()
	if err != nil {
		return nil, err
	}
	return &objects{definitions, append(rights(), certificates...), hooks()}, nil
}

func definitions() ([]runtime.Object, error) {
	var all []runtime.Object
	for _, definition := range []func() (*extensions.CustomResourceDefinition, error){
		components.NewKubeVirtCrd,
		components.NewVirtualMachineCrd,
		components.NewVirtualMachineInstanceCrd,
		components.NewVirtualMachineInstanceMigrationCrd,
		components.NewPresetCrd,
		components.NewReplicaSetCrd,
		components.NewVirtualMachinePoolCrd,
		components.NewVirtualMachineCloneCrd,
		components.NewVirtualMachineExportCrd,
		components.NewVirtualMachineSnapshotCrd,
		components.NewVirtualMachineSnapshotContentCrd,
		components.NewVirtualMachineRestoreCrd,
		components.NewVirtualMachineInstancetypeCrd,
		components.NewVirtualMachineClusterInstancetypeCrd,
		components.NewVirtualMachinePreferenceCrd,
		components.NewVirtualMachineClusterPreferenceCrd,
		components.NewMigrationPolicyCrd,
	} {
		made, err := definition()
		if err != nil {
			return nil, err
		}
		all = append(all, made)
	}
	return all, nil
}

func rights() []runtime.Object {
	all := []runtime.Object{components.NewKubeVirtPriorityClassCR()}
	for _, some := range [][]runtime.Object{
		rbac.GetAllCluster(),
		rbac.GetAllApiServer(namespace),
		rbac.GetAllController(namespace),
		rbac.GetAllHandler(namespace),
	} {
		all = append(all, some...)
	}
	return all
}

// certificates returns the authority's Secret, the Secrets that it signs and the ConfigMaps with its certificate.
func certificates() ([]runtime.Object, error) {
	valid := &meta.Duration{Duration: lifetime}
	var all []runtime.Object
	authorities := components.NewCACertSecrets(namespace)
	for _, authority := range authorities {
		if err := components.PopulateSecretWithCertificate(authority, nil, valid); err != nil {
			return nil, err
		}
		all = append(all, authority)
	}
	signer, err := components.LoadCertificates(authorities[0])
	if err != nil {
		return nil, err
	}
	for _, secret := range components.NewCertSecrets(namespace, namespace) {
		if err := components.PopulateSecretWithCertificate(secret, signer, valid); err != nil {
			return nil, err
		}
		all = append(all, secret)
	}
	for _, bundle := range components.NewCAConfigMaps(namespace) {
		bundle.Data = map[string]string{components.CABundleKey: string(authorities[0].Data["tls.crt"])}
		all = append(all, bundle)
	}
	return all, nil
}

func hooks() []runtime.Object {
	all := []runtime.Object{
		components.NewVirtAPIMutatingWebhookConfiguration(namespace),
		components.NewVirtAPIValidatingWebhookConfiguration(namespace),
		components.NewApiServerService(namespace),
	}
	for _, service := range components.NewVirtAPIAPIServices(namespace) {
		all = append(all, service)
	}
	return all
}
