//! Words for TLS connections that don't come about.

/// What rustls says, in words that a person can act on.
pub(super) fn explain(cause: &str) -> String {
    if cause.contains("UnknownIssuer") {
        format!("the server's certificate isn't trusted ({cause}); give the certificate of its authority as ca_file")
    } else if cause.contains("certificate not valid for name") {
        format!("the server's certificate is for another name ({cause}); connect by a name that it is for")
    } else if cause.contains("InvalidContentType") {
        format!("the server speaks no TLS on this port ({cause}); correct the transport's url and ca_file")
    } else {
        cause.to_owned()
    }
}
