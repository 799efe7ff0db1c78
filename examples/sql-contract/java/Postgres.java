import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;

/** Places an order and publishes a message about it, in one transaction. PostgreSQL, with its JDBC driver. */
public class Postgres {
    static String destination, customer, contentType;
    static byte[] payload;

    static void placeOrder(Connection db) throws SQLException {
        try (PreparedStatement order = db.prepareStatement("INSERT INTO orders (customer) VALUES (?)")) {
            order.setString(1, customer);
            order.executeUpdate();
        }
        try (PreparedStatement message = db.prepareStatement(
                "INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)"
                    + " VALUES (?, ?, ?, ?, CAST(? AS json), ?)")) {
            message.setString(1, destination);
            message.setString(2, "order.placed.v1");
            message.setString(3, customer);
            message.setString(4, contentType);
            message.setString(5, "{\"shop\": \"北京\"}");
            message.setBytes(6, payload);
            message.executeUpdate();
        }
    }

    /** Publishes only if this dedup key was never used. The order is placed in any case. */
    static boolean placeOrderOnce(Connection db, String dedupKey) throws SQLException {
        try (PreparedStatement order = db.prepareStatement("INSERT INTO orders (customer) VALUES (?)")) {
            order.setString(1, customer);
            order.executeUpdate();
        }
        try (PreparedStatement message = db.prepareStatement(
                "WITH fresh AS (INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES (?, ?)"
                    + "             ON CONFLICT DO NOTHING RETURNING message_id)"
                    + " INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)"
                    + " SELECT message_id, ?, ?, ?, ?, ? FROM fresh")) {
            message.setString(1, dedupKey);
            message.setString(2, dedupKey);
            message.setString(3, destination);
            message.setString(4, "order.placed.v1");
            message.setString(5, customer);
            message.setString(6, contentType);
            message.setBytes(7, payload);
            return message.executeUpdate() == 1;
        }
    }

    public static void main(String[] args) throws Exception {
        if (args.length < 5) {
            System.err.println("usage: Postgres JDBC_URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]");
            System.exit(2);
        }
        destination = args[1];
        customer = args[2];
        contentType = args[3];
        payload = Files.readAllBytes(Path.of(args[4]));
        String how = args.length > 5 ? args[5] : "";
        try (Connection db = DriverManager.getConnection(args[0])) {
            db.setAutoCommit(false);
            try {
                boolean fresh = true;
                if (how.equals("once")) {
                    fresh = placeOrderOnce(db, args[6]);
                } else {
                    placeOrder(db);
                }
                if (how.equals("declined")) {
                    throw new IllegalStateException("the payment was declined: neither the order nor the message stays");
                }
                db.commit();
                System.out.println(fresh ? "published" : "published before");
            } catch (Exception e) {
                db.rollback();
                throw e;
            }
        }
    }
}
