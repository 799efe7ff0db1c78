import java.nio.file.Files;
import java.nio.file.Path;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;

/** Places an order and publishes a message about it, in one transaction. MariaDB and MySQL, with MariaDB Connector/J. */
public class MariaDb {
    static final int DUPLICATE_ENTRY = 1062;
    static String destination, customer, contentType;
    static byte[] payload;

    static void placeOrder(Connection db) throws SQLException {
        try (PreparedStatement order = db.prepareStatement("INSERT INTO orders (customer) VALUES (?)")) {
            order.setString(1, customer);
            order.executeUpdate();
        }
        try (PreparedStatement message = db.prepareStatement(
                "INSERT INTO posthouse_message (destination, type, message_key, content_type, headers, payload)"
                    + " VALUES (?, ?, ?, ?, ?, ?)")) {
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
        try (PreparedStatement claim = db.prepareStatement(
                "INSERT INTO posthouse_dedup (dedup_key, message_id) VALUES (?, ?)")) {
            claim.setString(1, dedupKey);
            claim.setString(2, dedupKey);
            claim.executeUpdate();
        } catch (SQLException e) {
            if (e.getErrorCode() == DUPLICATE_ENTRY) {
                return false;
            }
            throw e;
        }
        try (PreparedStatement message = db.prepareStatement(
                "INSERT INTO posthouse_message (message_id, destination, type, message_key, content_type, payload)"
                    + " VALUES (?, ?, ?, ?, ?, ?)")) {
            message.setString(1, dedupKey);
            message.setString(2, destination);
            message.setString(3, "order.placed.v1");
            message.setString(4, customer);
            message.setString(5, contentType);
            message.setBytes(6, payload);
            message.executeUpdate();
        }
        return true;
    }

    public static void main(String[] args) throws Exception {
        if (args.length < 5) {
            System.err.println("usage: MariaDb JDBC_URL DESTINATION KEY CONTENT_TYPE FILE [declined | once DEDUP_KEY]");
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
