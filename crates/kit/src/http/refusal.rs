//! What the HTTP library refuses by itself, with our error object.
//!
//! Headers that are too large, and a request that is none, never come to a service: the library answers them with a status
//! and nothing else. Such an answer is one write of a head that says that no body follows; it leaves here with a body.
//! What does not look like that goes through as it is.

const NO_BODY: &str = "content-length: 0\r\n";

/// The answer with a body, if it is one of the library's own.
pub(super) fn explained(answer: &[u8]) -> Option<Vec<u8>> {
    let head = std::str::from_utf8(answer.strip_suffix(b"\r\n\r\n")?).ok()?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?;
    let (code, message) = match status {
        "400" => ("bad_request", "this is not an HTTP request"),
        "414" => ("uri_too_long", "the path is too long"),
        "431" => ("headers_too_large", "the headers are larger than 64 KiB, or more than 100"),
        _ => return None,
    };
    let head = format!("{head}\r\n");
    if head.contains("\r\n\r\n") || head.contains("content-type:") || !head.contains(NO_BODY) {
        return None;
    }
    let error = serde_json::json!({ "error": {
        "message": message, "type": "invalid_request_error", "param": null, "code": code
    } });
    let error = error.to_string();
    let said = format!("content-type: application/json\r\ncontent-length: {}\r\n", error.len());
    Some(format!("{}\r\n{error}", head.replacen(NO_BODY, &said, 1)).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_librarys_own_refusals_get_a_body() {
        let of = |text: &str| explained(text.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap());
        let answer =
            of("HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\ndate: x\r\n\r\n")
                .unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
        assert!(head.contains("application/json") && head.ends_with("date: x"), "{answer}");
        let error: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(error["error"]["code"], "headers_too_large");
        for other in [
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\ndata",
            "HTTP/1.1 400 Bad Request\r\ncontent-type: a/b\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 4",
            "data: [DONE]\r\n\r\n",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
