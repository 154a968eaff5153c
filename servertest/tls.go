package servertest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// Certs are a certificate authority of the test with one certificate for servers and one for
// clients, in files in PEM form.
type Certs struct {
	CA        string // of the authority
	Cert, Key string // of a client
	server    [2]string
	pool      *x509.CertPool
}

// TLS makes a certificate authority. Its servers are 127.0.0.1, localhost and cache.test.
func TLS(t testing.TB) *Certs {
	t.Helper()
	dir := t.TempDir()
	c := &Certs{
		CA:     filepath.Join(dir, "ca.pem"),
		Cert:   filepath.Join(dir, "client.pem"),
		Key:    filepath.Join(dir, "client.key"),
		server: [2]string{filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key")},
		pool:   x509.NewCertPool(),
	}
	template := func(name string, serial int64) *x509.Certificate {
		return &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	}
	root := template("servertest", 1)
	root.IsCA, root.BasicConstraintsValid, root.KeyUsage = true, true, x509.KeyUsageCertSign
	rootKey := certify(t, root, root, nil, c.CA, "")
	c.pool.AddCert(root)

	server := template("server", 2)
	server.DNSNames = []string{"localhost", "cache.test"}
	server.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	certify(t, server, root, rootKey, c.server[0], c.server[1])

	client := template("client", 3)
	client.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	certify(t, client, root, rootKey, c.Cert, c.Key)
	return c
}

// certify signs a certificate, by its own key where there is no other, fills in what signing
// adds, and writes it.
func certify(t testing.TB, cert, parent *x509.Certificate, by *ecdsa.PrivateKey, certFile, keyFile string) *ecdsa.PrivateKey {
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Fatalf("servertest: certificates: %v", err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	fail(err)
	if by == nil {
		by = key
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, by)
	fail(err)
	signed, err := x509.ParseCertificate(der)
	fail(err)
	*cert = *signed
	fail(os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	if keyFile != "" {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		fail(err)
		fail(os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
	}
	return key
}

// Config is what a client needs to trust the servers, and to show its certificate.
func (c *Certs) Config(t testing.TB) *tls.Config {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(c.Cert, c.Key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: c.pool, Certificates: []tls.Certificate{pair}}
}

// Server names the files of the servers' certificate and of its key.
func (c *Certs) Server() (cert, key string) { return c.server[0], c.server[1] }

// WithTLS gives the server a port with TLS beside the plain one; see [RedisServer.TLSAddr]. It
// asks clients for no certificate unless Config("tls-auth-clients", "yes") follows.
func WithTLS(c *Certs) RedisOption {
	return func(o *redisOptions) {
		o.config["tls-port"] = []string{"0"}
		o.config["tls-ca-cert-file"] = []string{c.CA}
		o.config["tls-cert-file"] = []string{c.server[0]}
		o.config["tls-key-file"] = []string{c.server[1]}
		o.config["tls-auth-clients"] = []string{"no"}
	}
}

// TLSAddr is host:port of the port with TLS.
func (s *RedisServer) TLSAddr() string {
	s.t.Helper()
	port, err := strconv.Atoi(s.base.config["tls-port"][0])
	if err != nil || port == 0 {
		s.t.Fatal("servertest: the server has no TLS; start it with WithTLS")
	}
	return loopback(port)
}
